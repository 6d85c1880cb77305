"""The bottom room: the only one that imports SGLang. It gives SGLang's private base classes and types to the others.

Each module adapts one part of SGLang and says which: it exports SGLang's classes to derive from, reads or writes their
attributes, or replaces one of their functions or methods in this process. So an upgrade of SGLang touches this room
only. Importing the package itself does not import SGLang; its modules do so inside `bootstrap.importing()`.
"""
