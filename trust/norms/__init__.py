"""Measures the error of each per-example norm formula on large layers."""
