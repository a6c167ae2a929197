"""A server that speaks MCP, to be run: python mcp_rig.py [PORT]; over its streams, or over HTTP on
a port.
"""

import asyncio
import os
import subprocess
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("rig")
counted = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count() -> int:
    """How often it was asked."""
    global counted
    counted += 1
    return counted


@server.tool()
def fail() -> str:
    """Raises."""
    raise ValueError("nothing there")


@server.tool()
async def hang() -> str:
    """Gives no answer."""
    await asyncio.sleep(600)
    return ""


@server.tool()
def much() -> str:
    """A megabyte."""
    return "x" * (1 << 20)


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def spawn() -> int:
    """Starts a program that would outlive the server."""
    return subprocess.Popen(
        ["sleep", "1000"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ).pid


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run(transport="stdio")
