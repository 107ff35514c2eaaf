# until every folder imports from labels
from .labels import amount as amount
from .labels import short as short
