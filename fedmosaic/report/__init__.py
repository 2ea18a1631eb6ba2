"""Reports: tables, figures, one self-contained HTML page."""
