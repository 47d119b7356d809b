"""Exports of models for serving (docs/serving.md).

Writes full exports and increments, and applies them to the places where models are served.
"""
