"""From n ranks to m ranks."""
