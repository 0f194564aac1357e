"""What people see of a comparison: `report.html`, `report.md` and `junit.xml`, of a gate or of any runs.

Read first: `view.py` (all that a page says, as data), then `of_gate.py` and `of_runs.py` (which make one of a gate's
result, of results folders). `arm.py` has what is drawn of a run, `requests.py` its worst requests in words, `words.py`
figures and their meaning. `page.py` (with `page.html`, `page.css`, `page.js`), `markdown.py` and `junit.py` write.
"""
