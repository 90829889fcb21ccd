"""Small programs, one for each feature of torch that users meet: a function of a device.

Each returns what it computed, nested as it likes. Numbers are drawn on the CPU, so that both devices
get the same; of what a device draws itself, only what is certain is returned: shapes, means of many.
"""

from feature_cases import functions, training, layers, files, mathematics, chance, tools  # noqa: F401, I001  # in the order of the table
from feature_cases.programs import FEATURES as FEATURES
