"""Figures, and the tables behind them: `plan` draws what is solved, `sweep` and `study` what is simulated."""

from testbed.figures.plan import plot_plan

__all__ = ["plot_plan"]
