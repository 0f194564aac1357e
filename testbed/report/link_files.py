"""The link doctor in a results folder: `link.csv` and `link.html`.

Of a run that has just ended, by its tables; of any results folder again, by its files (`prfaas report link`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from testbed.report.link_axis import Axis, link_axis, make_axis
from testbed.report.link_doctor import Diagnosis, diagnose
from testbed.report.link_page import page
from testbed.report.link_words import CSV, PAGE


@dataclass(frozen=True, slots=True)
class LinkReport:
    """axis: what link.csv holds. told: what the doctor says."""

    axis: Axis
    told: Diagnosis

    @classmethod
    def of_run(cls, timeline: pd.DataFrame, requests: pd.DataFrame, summary: dict[str, Any]) -> LinkReport:
        """Of a run's tables; the summary without the doctor's own words."""
        axis = make_axis(timeline, requests, summary)
        return cls(axis, diagnose(axis))

    @classmethod
    def of_folder(cls, folder: Path) -> LinkReport:
        """Of a results folder. Raises RunError for one that lacks what it takes."""
        axis = link_axis(folder)
        return cls(axis, diagnose(axis))

    def write(self, folder: Path) -> None:
        """Write link.csv and link.html into a results folder."""
        self.axis.table.to_csv(folder / CSV, index=False, float_format="%.6f")
        self.write_page(folder / PAGE)

    def write_page(self, path: Path) -> None:
        path.write_text(page(self.axis, self.told), encoding="utf-8")
