"""Pictures of a run: one self-contained HTML page and one PNG."""

from sennit.report.build import ReportFiles, build_report

__all__ = ["ReportFiles", "build_report"]
