"""TCP between two network namespaces: `throughput.py serve PORT`, then `throughput.py send ADDRESS PORT SECONDS`, which
prints the Mbit/s that the other end received."""
import socket
import struct
import sys
import time


def serve(port):
    listener = socket.create_server(("0.0.0.0", port))
    buffer = bytearray(1 << 20)
    while True:
        connection, _ = listener.accept()
        total = 0
        while got := connection.recv_into(buffer):
            total += got
        connection.sendall(struct.pack("!Q", total))
        connection.close()


def send(address, port, seconds):
    connection = socket.create_connection((address, port), timeout=30)
    chunk = bytes(1 << 18)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        connection.sendall(chunk)
    connection.shutdown(socket.SHUT_WR)
    answer = connection.recv(8, socket.MSG_WAITALL)
    took = time.monotonic() - began
    print(f"{struct.unpack('!Q', answer)[0] * 8 / took / 1e6:.0f}")


if sys.argv[1] == "serve":
    serve(int(sys.argv[2]))
else:
    send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
