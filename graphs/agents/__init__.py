"""Agent programs as somebody else wrote them: they import nothing of this project."""
