package mps

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/cuda"
)

// File descriptors with which the control daemon starts a server.
const (
	ordersDescriptor = 3
	listenDescriptor = 4
	logDescriptor    = 5
)

const serverProgram = "nvidia-cuda-mps-server"

// server is what the control daemon knows about a server process. The mutex of control guards the
// fields.
type server struct {
	pid      int
	user     uint32
	socket   string
	limits   Limits
	clients  []clientReport
	ready    bool
	draining bool
	// joining counts the clients that have got the server's address but are not yet connected.
	joining int
	// failed says why the server ended before it was ready. The value remains until a waiting client
	// has received it.
	failed *cuda.Error
	// wanted is true while a start_server command waits for the server to become ready.
	wanted bool

	sent, applied int // Numbers of the latest limits that the daemon sent and the server applied

	orders  *conn
	process *os.Process
}

// drain tells the server to admit no more clients. The server ends with its last client.
func (s *server) drain() {
	s.draining = true
	_ = s.orders.encoder.Encode(order{Drain: true})
}

// startServer starts a server and stores it in c.server. If the start fails, c.server.failed says
// why. The caller holds the mutex.
func (c *control) startServer(user uint32) {
	s, command, err := c.launch(user)
	if err != nil {
		c.log.printf("Failed to start server using uid %d. %v", user, err)
		c.server = &server{user: user, failed: cuda.Errorf(cuda.MPSServerNotReady, "start %s: %v", serverProgram, err)}
		return
	}
	c.server = s
	c.log.printf("Starting new server %d for user %d", s.pid, user)
	go c.follow(s, command)
}

func (c *control) launch(user uint32) (*server, *exec.Cmd, error) {
	program, err := exec.LookPath(serverProgram) // like the real control daemon
	if err != nil {
		return nil, nil, err
	}
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	own, theirs := os.NewFile(uintptr(pair[0]), "orders"), os.NewFile(uintptr(pair[1]), "orders")
	defer func() { _, _ = own.Close(), theirs.Close() }()
	name := fmt.Sprintf("server-%d", user)
	listener, err := c.listen(name, 0o666)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = listener.Close() }()
	listening, err := listener.File()
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = listening.Close() }()
	log := os.Stdout
	if !c.foreground {
		if log, err = openLog(serverLog); err != nil {
			return nil, nil, err
		}
		defer func() { _ = log.Close() }()
	}
	command := exec.Command(program)
	command.Args[0] = serverProgram
	command.ExtraFiles = []*os.File{theirs, listening, log}
	command.Dir = "/"
	if os.Getuid() == 0 {
		command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	}
	if err := command.Start(); err != nil {
		return nil, nil, err
	}
	orders, err := net.FileConn(own)
	if err != nil {
		return nil, nil, errors.Join(err, command.Process.Kill())
	}
	s := &server{
		pid:     command.Process.Pid,
		user:    user,
		socket:  name,
		limits:  c.defaults.clone(),
		orders:  newConn(orders),
		process: command.Process,
	}
	return s, command, s.orders.encoder.Encode(setup{Limits: s.limits, User: user})
}

// follow stores what server s reports about its clients and limits until the server has ended. It
// then removes the server's socket and, if clients still wait for a server that never became ready,
// stores the error for them.
func (c *control) follow(s *server, command *exec.Cmd) {
	var failed *cuda.Error
	for {
		var said report
		if s.orders.decoder.Decode(&said) != nil {
			break
		}
		c.mutex.Lock()
		s.clients, s.applied = said.Clients, said.Applied
		if said.Ready && !s.ready {
			s.ready = true
			c.log.printf("NEW SERVER %d: Ready", s.pid)
		}
		if said.Error != nil {
			failed = said.Error
		}
		c.mutex.Unlock()
		c.changed.Broadcast()
	}
	err := command.Wait()
	_ = s.orders.Close()
	c.mutex.Lock()
	defer c.changed.Broadcast()
	defer c.mutex.Unlock()
	c.log.printf("Server %d exited with status %d", s.pid, command.ProcessState.ExitCode())
	_ = os.Remove(filepath.Join(c.pipes, s.socket))
	if err != nil {
		c.status = 1
	}
	if c.server != s {
		return
	}
	c.server = nil
	if s.ready || (len(c.waiting) == 0 && !s.wanted) {
		return
	}
	if failed == nil {
		failed = cuda.Errorf(cuda.MPSServerNotReady, "%s ended before it was ready: %v", serverProgram, err)
	}
	s.failed = failed
	c.server = s
}
