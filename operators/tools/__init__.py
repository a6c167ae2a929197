"""Tools that a policy calls in an episode: Python functions, a sandbox of its own, servers that
speak MCP.
"""

from operators.chat.tool_calls import TextCalls
from operators.tools.mcp_server import McpServer
from operators.tools.sandbox_tools import Sandbox

__all__ = ["McpServer", "Sandbox", "TextCalls"]
