"""The library needs torch and safetensors alone."""

import subprocess
import sys

WHOLE_USE = """
import sys, warnings
others = ("numpy", "scipy", "sklearn", "matplotlib", "torchvision", "timm", "tqdm")
frameworks = ("lightning", "pytorch_lightning", "transformers", "accelerate", "avalanche", "laplace", "curvlinops")
for name in others + frameworks:
    sys.modules[name] = None  # as if it were not installed
warnings.filterwarnings("ignore")
import torch, xkfac
from torch import nn

net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
data = [torch.randn(8, 4) for _ in range(3)]
memory = xkfac.consolidate(net, data)
for dtype in (torch.float32, torch.bfloat16):
    memory.save(sys.argv[1], dtype)
    memory = xkfac.Memory.load(sys.argv[1], net)
learner = xkfac.Learner(net, memory, balance=xkfac.Balance())
learner.begin(data)
net.train()
learner.objective(net(data[0]).square().mean()).backward()
print(learner.finish(data).tasks)
assert not [name for name in sys.modules if name.startswith("xkfac.integrations")]
"""


def test_a_whole_use_without_other_packages(tmp_path):
    command = [sys.executable, "-c", WHOLE_USE, str(tmp_path / "memory")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.returncode) == ("2", 0), result.stderr
