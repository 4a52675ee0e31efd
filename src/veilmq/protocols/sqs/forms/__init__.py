"""The two wire forms of SQS, JSON and Query, and the shapes that both carry.

Strategy: either form is decoded to the same input and written from the same result (shapes.py), so every operation is
written once.
"""
