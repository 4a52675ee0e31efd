"""The history as a Spark data source, from a server or from exported Parquet.

Strategy: `reading` knows where events come from, as Arrow record batches by offset; `source` tells Spark how to split
them; `export` writes them down. The columns are those of `/api/v1/events`.
"""
