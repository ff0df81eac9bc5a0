package mps

import (
	"encoding/json"
	"fmt"
	"net"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/cuda"
)

// conn carries JSON values, one after the other.
type conn struct {
	net.Conn
	encoder *json.Encoder
	decoder *json.Decoder
}

func newConn(c net.Conn) *conn { return &conn{c, json.NewEncoder(c), json.NewDecoder(c)} }

func dial(path string) (*conn, error) {
	c, err := net.Dial("unix", path)
	if err != nil {
		return nil, err
	}
	return newConn(c), nil
}

// peer is who is at the other end. The PID is 0 for a process of a PID namespace that this one does not see into.
func peer(c *conn) (*syscall.Ucred, error) {
	u, ok := c.Conn.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("%T is no Unix socket", c.Conn)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, err
	}
	var credentials *syscall.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) {
		credentials, failed = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err != nil {
		return nil, err
	}
	return credentials, failed
}

// request is what is asked of the control daemon: to be let in as a client, or a command.
type request struct {
	Attach bool `json:"attach,omitempty"`
	// Not is a server that the client found to be ending.
	Not     int    `json:"not,omitempty"`
	Command string `json:"command,omitempty"`
}

// answer is the control daemon's. To an attach there may be one that says Pending before the one that counts.
type answer struct {
	Error   *cuda.Error `json:"error,omitempty"`
	Pending bool        `json:"pending,omitempty"`
	// Socket is the server's, a name in the pipe directory.
	Socket string `json:"socket,omitempty"`
	Server int    `json:"server,omitempty"`
	Text   string `json:"text,omitempty"`
	// Done says that the daemon ends.
	Done bool `json:"done,omitempty"`
}

// Limits hold for each client process: a part of the threads of every device, and MiB of memory by the device's number.
type Limits struct {
	Threads float64        `json:"threads"`
	Memory  map[int]uint64 `json:"memory,omitempty"`
}

// hello is what a client tells the server first.
type hello struct {
	// Shared is a file in /dev/shm, and Token its content.
	Shared string `json:"shared"`
	Token  string `json:"token"`
	// Devices is CUDA_VISIBLE_DEVICES.
	Devices string `json:"devices,omitempty"`
	Set     bool   `json:"set,omitempty"`
	// Threads and Memory are the client's own limits, of its environment; memory by number or UUID.
	Threads float64           `json:"threads,omitempty"`
	Memory  map[string]uint64 `json:"memory,omitempty"`
	Command string            `json:"command"`
	// PID is the client's own idea, in its own PID namespace.
	PID int `json:"pid"`
}

// welcome is the server's answer.
type welcome struct {
	Error *cuda.Error `json:"error,omitempty"`
	// Again says that the server is about to end: ask the control daemon again.
	Again   bool     `json:"again,omitempty"`
	Devices []Device `json:"devices,omitempty"`
}

// Device is one that a program computes on, with what holds for it there.
type Device struct {
	Ordinal   int    `json:"ordinal"`
	UUID      string `json:"uuid"`
	Name      string `json:"name"`
	MemoryMiB uint64 `json:"memoryMiB"`
	// MemoryLimitMiB is 0 where there is no limit but the memory.
	MemoryLimitMiB   uint64  `json:"memoryLimitMiB,omitempty"`
	ThreadPercentage float64 `json:"threadPercentage"`
}

// allocation is what a client asks of the server later on.
type allocation struct {
	Ordinal int    `json:"ordinal"`
	MiB     uint64 `json:"mib"`
}

type allocated struct {
	Error *cuda.Error `json:"error,omitempty"`
}

// setup is what the control daemon tells a server that it starts.
type setup struct {
	Limits Limits `json:"limits"`
	User   uint32 `json:"user"`
}

// order is what it tells it later.
type order struct {
	// Drain: take nobody in, and end with the last client.
	Drain bool `json:"drain,omitempty"`
	// Limits are for those who come from now on.
	Limits *Limits `json:"limits,omitempty"`
	// Number counts the limits that were sent.
	Number int `json:"number,omitempty"`
	// Terminate ends a client.
	Terminate int `json:"terminate,omitempty"`
}

// report is what a server tells the control daemon: that it is ready or could not start, and at every change who its clients are.
type report struct {
	Ready   bool           `json:"ready,omitempty"`
	Error   *cuda.Error    `json:"error,omitempty"`
	Clients []clientReport `json:"clients"`
	// Applied is the number of the limits that hold.
	Applied int `json:"applied,omitempty"`
}

type clientReport struct {
	PID     int      `json:"pid"`
	ID      int      `json:"id"`
	Devices []string `json:"devices"`
	Command string   `json:"command"`
}
