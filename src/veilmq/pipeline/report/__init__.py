"""A page that shows the jobs' results: one self-contained HTML file, for light and dark.

Strategy: `figures` draws each answer as an SVG with matplotlib, in colours that stand for roles; `page` places the
figures between text and assigns the colours. Both take pandas frames and do not use Spark.
"""
