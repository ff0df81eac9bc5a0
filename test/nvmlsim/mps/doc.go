// Package mps has stand-ins for the programs of CUDA's Multi-Process Service (MPS) on simulated
// GPUs: the control daemon, the server, and the program that sends commands to the daemon. It also
// has the part of a CUDA program that makes the program an MPS client.
//
// Command lines, environment variables, files in the pipe directory, answers, logs and the
// admission of clients are those of the real programs. The protocol on the sockets is this
// package's own. The simulator's README lists behaviour that the real programs do not document.
package mps
