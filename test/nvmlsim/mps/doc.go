// Package mps is a stand-in for the programs of CUDA's Multi-Process Service, on simulated GPUs: the control daemon, the server that it starts for the
// first client, the control program's client side, and what a CUDA program does to become a client.
//
// Seen from outside (command lines, environment, files in the pipe directory, answers, logs, who is let in when) it does what the real programs are known
// to do. What goes over its sockets is its own, and so is everything where the real programs' behaviour is not documented: the README of the simulator
// says which that is.
package mps
