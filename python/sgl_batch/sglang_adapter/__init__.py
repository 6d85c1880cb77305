"""The bottom room: the only place that imports SGLang, and hands its private bases and types to the others.

Importing this package alone does not import SGLang; each module here does so inside `bootstrap.importing()`.
"""
