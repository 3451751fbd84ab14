"""The pages of a report, each one file of HTML: a run, a sweep, two runs compared. page.py renders; charts.py draws."""
