"""What people see of a comparison: `report.html`, `report.md` and `junit.xml`, of a gate or of any runs.

Read first: `view.py` (all that a page says, as data), then `of_gate.py` and `of_runs.py`, which make one of a gate's
result and of results folders (`alike.py` reads these). `arm.py` has what is drawn of a run, `requests.py` its worst
requests in words, `figures.py` its figures, `words.py` what all of it is called and means. `page.py` (with `page.html`,
`page.css`, `page.js`), `markdown.py` and `junit.py` write; `write.py` is what commands call.
"""
