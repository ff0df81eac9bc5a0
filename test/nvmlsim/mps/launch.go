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

// Descriptors that a server is started with.
const (
	ordersDescriptor = 3
	listenDescriptor = 4
	logDescriptor    = 5
)

const serverProgram = "nvidia-cuda-mps-server"

// server is a server process as the control daemon knows it. All of it is guarded by the daemon's mutex.
type server struct {
	pid      int
	user     uint32
	socket   string
	limits   Limits
	clients  []clientReport
	ready    bool
	draining bool
	// joining are the clients that were told the server and are not its clients yet.
	joining int
	// failed is why it ended before it was ready. Then it stays until one who waits has been told.
	failed *cuda.Error
	// wanted says that a command waits for it.
	wanted bool

	sent, applied int // how many limits were sent, and hold

	orders  *conn
	process *os.Process
}

// drain lets nobody in any more; the server ends with its last client.
func (s *server) drain() {
	s.draining = true
	_ = s.orders.encoder.Encode(order{Drain: true})
}

// startServer starts a server. Caller holds the mutex, and finds what came of it in c.server.
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
	program, err := exec.LookPath(serverProgram) // as the real one does
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
	s := &server{pid: command.Process.Pid, user: user, socket: name, limits: c.defaults.clone(), orders: newConn(orders), process: command.Process}
	return s, command, s.orders.encoder.Encode(setup{Limits: s.limits, User: user})
}

// follow takes a server's reports until it has ended.
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
