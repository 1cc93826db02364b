import json
import os
import subprocess
import sys

if len(sys.argv) == 1:  # start two workers on this machine
    workers = [subprocess.Popen([sys.executable, __file__, str(i)]) for i in range(2)]
    sys.exit(max(worker.wait() for worker in workers))
cluster, index = {"worker": ["localhost:20301", "localhost:20302"]}, int(sys.argv[1])
os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": cluster, "task": {"type": "worker", "index": index}}
)
import keras, numpy, tensorflow  # noqa: E401, E402

with tensorflow.distribute.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(numpy.ones((8, 1)), numpy.ones((8, 1)), verbose=0)
