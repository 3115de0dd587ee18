"""`magic_pipeline.MagicExperiment`: an experiment in a Dagster project of your own, by a few lines of defs.yaml.

```yaml
type: magic_pipeline.MagicExperiment
attributes:
  experiment: digits.yaml
```
"""

# No postponed annotations here: Dagster reads the fields' types.

from pathlib import Path

import dagster as dg
from pydantic import Field

from magic_pipeline.errors import InputError
from magic_pipeline.orchestration.building import build_definitions


class MagicExperiment(dg.Component, dg.Model, dg.Resolvable):
    """One experiment file, or a folder of them: its assets, jobs, sensors and schedule.

    The project's own executor and instance stay as they are; docs/dagster.md says what the instance should have.
    """

    experiment: str = Field(description="An experiment file, or a folder of them; relative to the defs.yaml's folder.")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Raises InputError where there is no such file or folder; a file that is wrong becomes an asset that shows the error."""
        path = Path(context.path / self.experiment).absolute()
        if not path.exists():
            raise InputError("there is no such file or folder", file=path, field="experiment")
        return build_definitions(path, executor=None)
