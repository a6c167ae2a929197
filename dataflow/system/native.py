"""Hands the compiler of C files, and where its work lies, on to all that may not look below this
package.
"""

from transport.compile import NOTES, STARTING, cache_folder, compiled, compilers_caches

__all__ = ["NOTES", "STARTING", "cache_folder", "compiled", "compilers_caches"]
