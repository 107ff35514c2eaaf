# until every folder imports from labels
from .labels import aligned as aligned
from .labels import host_empty as host_empty
from .labels import page_locked as page_locked
from .labels import view as view
