"""What is shown: tables, figures and the page of a run.

Results of runs come in; text, CSV, SVG, PNG and one HTML page go out.
"""
