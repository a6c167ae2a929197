"""All laws, by the part of the design that has them."""

from .chat import CHAT
from .episodes import EPISODES
from .hosts import HOSTS
from .language import LANGUAGE, STRUCTURE
from .planes import DATA_PLANE, WEIGHT_PLANE
from .records import RECORDS
from .runs import LEDGER, SCHEDULER, STALENESS, TURNS
from .security import SECURITY
from .tools import TOOLS

ROOMS = {
    "Rooms": STRUCTURE,
    "The language": LANGUAGE,
    "Records and the run folder": RECORDS,
    "Conversations": CHAT,
    "The data plane": DATA_PLANE,
    "The weight plane": WEIGHT_PLANE,
    "Security": SECURITY,
    "The scheduler": SCHEDULER,
    "Hosts": HOSTS,
    "Shared devices": TURNS,
    "Staleness": STALENESS,
    "The ledger, resume": LEDGER,
    "Episodes": EPISODES,
    "Tools": TOOLS,
}
LAWS = tuple(law for laws in ROOMS.values() for law in laws)
