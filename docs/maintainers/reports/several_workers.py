import json
import os
import subprocess
import sys

if len(sys.argv) == 1:  # start two workers on this machine
    workers = [subprocess.Popen([sys.executable, __file__, str(i)]) for i in range(2)]
    sys.exit(max(worker.wait() for worker in workers))
cluster = {"worker": ["localhost:20301", "localhost:20302"]}
task = {"type": "worker", "index": int(sys.argv[1])}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

with tf.distribute.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(tf.ones((8, 1)), tf.ones((8, 1)), verbose=0)
