"""What the tests of whole runs share."""
