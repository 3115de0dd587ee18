"""Tables and plots of scores; the only room with matplotlib.

Everything here is a function of ids, scores and what examples look like. Reading scores and choosing what to report belongs
elsewhere.
"""
