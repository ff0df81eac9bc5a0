package mps

import (
	"encoding/json"
	"fmt"
	"net"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/cuda"
)

// conn is a connection that carries a sequence of JSON values.
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

// peer returns the credentials of the process at the other end. The PID is 0 if that process is in
// a PID namespace that this process cannot see.
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

// request is a message to the control daemon. With Attach, the sender wants to become a client of a
// server; otherwise it sends a command.
type request struct {
	Attach bool `json:"attach,omitempty"`
	// Not is the PID of a server that the client has found to be ending. The daemon must assign
	// another.
	Not     int    `json:"not,omitempty"`
	Command string `json:"command,omitempty"`
}

// answer is a message from the control daemon. Before the final answer to an attach request, the
// daemon may send one with Pending.
type answer struct {
	Error   *cuda.Error `json:"error,omitempty"`
	Pending bool        `json:"pending,omitempty"`
	// Socket is the name of the server's socket in the pipe directory.
	Socket string `json:"socket,omitempty"`
	Server int    `json:"server,omitempty"`
	Text   string `json:"text,omitempty"`
	// Done is true if the command ends the daemon.
	Done bool `json:"done,omitempty"`
}

// Limits apply to each client process. Threads is the percentage of every device's threads, and
// Memory has MiB by device number.
type Limits struct {
	Threads float64        `json:"threads"`
	Memory  map[int]uint64 `json:"memory,omitempty"`
}

// hello is a client's first message to the server.
type hello struct {
	// Shared is the name of a file that the client put into /dev/shm, and Token that file's content.
	Shared string `json:"shared"`
	Token  string `json:"token"`
	// Devices is the client's CUDA_VISIBLE_DEVICES. Set is false if the variable is unset.
	Devices string `json:"devices,omitempty"`
	Set     bool   `json:"set,omitempty"`
	// Threads and Memory are limits from the client's environment. Memory has MiB by device number or
	// UUID.
	Threads float64           `json:"threads,omitempty"`
	Memory  map[string]uint64 `json:"memory,omitempty"`
	Command string            `json:"command"`
	// PID is the client's PID in the client's own PID namespace.
	PID int `json:"pid"`
}

// welcome is the server's answer to hello.
type welcome struct {
	Error *cuda.Error `json:"error,omitempty"`
	// Again tells the client to ask the control daemon again, because this server is about to end.
	Again   bool     `json:"again,omitempty"`
	Devices []Device `json:"devices,omitempty"`
}

// Device is a device on which a program computes, with the program's limits on it.
type Device struct {
	Ordinal   int    `json:"ordinal"`
	UUID      string `json:"uuid"`
	Name      string `json:"name"`
	MemoryMiB uint64 `json:"memoryMiB"`
	// MemoryLimitMiB is 0 if the program has no memory limit.
	MemoryLimitMiB   uint64  `json:"memoryLimitMiB,omitempty"`
	ThreadPercentage float64 `json:"threadPercentage"`
}

// allocation is a client's request for memory, sent to the server after hello.
type allocation struct {
	Ordinal int    `json:"ordinal"`
	MiB     uint64 `json:"mib"`
}

type allocated struct {
	Error *cuda.Error `json:"error,omitempty"`
}

// setup is the control daemon's first message to a server that it has started.
type setup struct {
	Limits Limits `json:"limits"`
	User   uint32 `json:"user"`
}

// order is any later message of the control daemon to a server.
type order struct {
	// Drain tells the server to admit no more clients and to end with its last client.
	Drain bool `json:"drain,omitempty"`
	// Limits replace the server's limits. They apply to clients that attach later.
	Limits *Limits `json:"limits,omitempty"`
	// Number is the sequence number of Limits. The server returns it as Applied.
	Number int `json:"number,omitempty"`
	// Terminate is the PID of a client whose connection the server must close.
	Terminate int `json:"terminate,omitempty"`
}

// report is a server's message to the control daemon. The server sends one when it is ready or has
// failed to start, and whenever its clients or limits change.
type report struct {
	Ready   bool           `json:"ready,omitempty"`
	Error   *cuda.Error    `json:"error,omitempty"`
	Clients []clientReport `json:"clients"`
	// Applied is the Number of the latest limits that the server has applied.
	Applied int `json:"applied,omitempty"`
}

type clientReport struct {
	PID     int      `json:"pid"`
	ID      int      `json:"id"`
	Devices []string `json:"devices"`
	Command string   `json:"command"`
}
