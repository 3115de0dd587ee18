"""Where an experiment's objects lie in the store. Paths only; no torch, no I/O.

```
{experiment}/{training fingerprint}/
   experiment.json          what the fingerprint was made from; queries.json: ids, keys, digests
   ledger/                  one create-only object before each segment of work
   trajectory/              a chain: the states at segment boundaries
   queries/{key}/{digest}/  a chain per query: its walk; plans/: its walk plans
   writers/                 one heartbeat object per process at work
   validation/{validation fingerprint}/   a bank of retrainings: bank.json, plans/, blocks/ (a chain a block), reports/
   scores/                  one Parquet a query; matrix/: all of them
```
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The paths of one training fingerprint."""

    experiment: str
    fingerprint: str

    @property
    def root(self) -> str:
        return f"{self.experiment}/{self.fingerprint}"

    @property
    def description(self) -> str:
        return f"{self.root}/experiment.json"

    @property
    def queries(self) -> str:
        return f"{self.root}/queries.json"

    @property
    def ledger(self) -> str:
        return f"{self.root}/ledger"

    @property
    def writers(self) -> str:
        return f"{self.root}/writers"

    @property
    def trajectory(self) -> str:
        return f"{self.root}/trajectory"

    def query(self, key: str, digest: str) -> str:
        return f"{self.root}/queries/{key}/{digest}"

    def plans(self, key: str, digest: str) -> str:
        return f"{self.query(key, digest)}/plans"

    @property
    def scores(self) -> str:
        return f"{self.root}/scores"

    @property
    def matrix(self) -> str:
        return f"{self.root}/scores/matrix"

    @property
    def validation(self) -> str:
        return f"{self.root}/validation"

    def bank(self, validation_fingerprint: str) -> BankLayout:
        return BankLayout(f"{self.validation}/{validation_fingerprint[:32]}")


@dataclass(frozen=True)
class BankLayout:
    """The paths of one bank of retrainings."""

    root: str

    @property
    def description(self) -> str:
        return f"{self.root}/bank.json"

    @property
    def plans(self) -> str:
        return f"{self.root}/plans"

    @property
    def blocks(self) -> str:
        return f"{self.root}/blocks"

    def block(self, first: int, width: int) -> str:
        """The chain of the block of `width` retrainings that begins with number `first`."""
        return f"{self.blocks}/{first:06d}-{width:04d}"

    def later(self, first: int, width: int) -> str:
        """The chain of that block's measurements of queries that came later."""
        return f"{self.root}/later/{first:06d}-{width:04d}"

    @property
    def reports(self) -> str:
        return f"{self.root}/reports"
