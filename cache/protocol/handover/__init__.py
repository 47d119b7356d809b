"""Lanes that change owners, and rows that change servers."""
