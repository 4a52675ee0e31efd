"""A page that shows what the jobs found: one HTML file, nothing beside it, for light and dark.

Strategy: `figures` draws each question's answer as an SVG by matplotlib, in colours that stand for roles; `page` puts
them between words and gives the roles their colours. Both take pandas frames and know no Spark.
"""
