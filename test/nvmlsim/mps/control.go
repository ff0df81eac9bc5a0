package mps

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/cuda"
)

// The first driver releases whose MPS programs have a feature.
const (
	releaseStatus     = 550 // get_server_status and the PID file; 535 has neither
	releasePrivileges = 550 // only root and the daemon's user change settings; with 535 every user can
	releaseMultiUser  = 555 // -multiuser-server; 550 does not know it
	releaseOptions    = 555 // refuses an unknown option; 550 then runs as a client
)

// control is the MPS control daemon. It starts the server and admits clients. Clients of only one
// user can be admitted at the same time.
type control struct {
	pipes      string
	multiUser  bool
	foreground bool
	log        *logger
	driver     *cuda.Driver

	mutex    sync.Mutex
	changed  *sync.Cond // uses mutex; signalled when the server or a client changes, or the daemon ends
	defaults Limits
	server   *server
	waiting  []*attach // clients that are not yet admitted, oldest first
	ending   bool
	status   int // exit status of the daemon
	ended    chan struct{}
}

// runDaemon runs the control daemon until a quit command. It calls ready as soon as it accepts
// connections.
func runDaemon(driver *cuda.Driver, multiUser, foreground bool, ready func()) (status int, err error) {
	openUmask()
	c := &control{pipes: pipes(), multiUser: multiUser, foreground: foreground, driver: driver, ended: make(chan struct{})}
	c.changed = sync.NewCond(&c.mutex)
	if err := makeFolder(c.pipes, 0o777); err != nil {
		return 1, fmt.Errorf("make the pipe directory: %w", err)
	}
	lock, err := c.lock()
	if err != nil {
		return 1, err
	}
	defer func() { _ = lock.Close() }()
	output := os.Stdout
	if !foreground {
		if output, err = openLog(controlLog); err != nil {
			return 1, fmt.Errorf("open the log: %w", err)
		}
	}
	c.log = &logger{to: output, role: "Control"}
	if err := c.driver.Meet("mpsControlStart"); err != nil {
		return 1, err
	}
	threads, _, err := environmentLimits()
	if err != nil {
		return 1, err
	}
	if threads == 0 {
		threads = 100
	}
	c.defaults = Limits{Threads: threads, Memory: map[int]uint64{}}
	return c.serve(ready)
}

// lock takes the pipe directory's lock, so that no second daemon can use the directory. The lock
// ends with the process.
func (c *control) lock() (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(c.pipes, lockFile), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, fmt.Errorf("open the lock: %w", err)
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(errRunning, file.Close())
	}
	return file, nil
}

// listen creates a socket in the pipe directory. It first removes a socket of the same name, which
// a killed daemon may have left.
func (c *control) listen(name string, mode os.FileMode) (*net.UnixListener, error) {
	path := filepath.Join(c.pipes, name)
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, errNoDaemon
	}
	listener.SetUnlinkOnClose(false) // the real daemon leaves its sockets behind too
	return listener, os.Chmod(path, mode)
}

func (c *control) serve(ready func()) (int, error) {
	var listeners []*net.UnixListener
	for name, mode := range map[string]os.FileMode{controlSocket: 0o666, privilegedSocket: 0o755} {
		listener, err := c.listen(name, mode)
		if err != nil {
			return 1, err
		}
		listeners = append(listeners, listener)
		go c.accept(listener)
	}
	if err := syscall.Mkfifo(filepath.Join(c.pipes, logPipe), 0o777); err != nil && !errors.Is(err, os.ErrExist) {
		return 1, err
	}
	if c.driver.Release() >= releaseStatus {
		if err := os.WriteFile(filepath.Join(c.pipes, pidFile), []byte(strconv.Itoa(os.Getpid())), 0o666); err != nil {
			return 1, err
		}
	}
	c.log.printf("Starting control daemon using socket %s", filepath.Join(c.pipes, controlSocket))
	c.log.printf("To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=%s", c.pipes)
	ready()
	<-c.ended
	for _, listener := range listeners {
		_ = listener.Close()
	}
	c.log.printf("Exit with status %d", c.status)
	for _, name := range []string{pidFile, logPipe} {
		if err := os.Remove(filepath.Join(c.pipes, name)); err != nil && !os.IsNotExist(err) {
			return 1, err
		}
	}
	return c.status, nil
}

func (c *control) accept(listener *net.UnixListener) {
	for {
		connection, err := listener.AcceptUnix()
		if err != nil {
			return
		}
		c.log.printf("Accepting connection...")
		go func() {
			defer func() { _ = connection.Close() }()
			c.answer(newConn(connection))
		}()
	}
}

// answer reads and answers the messages of one connection. The other end is either a client that
// asks to be admitted to a server, or a program that sends commands.
func (c *control) answer(connection *conn) {
	who, err := peer(connection)
	if err != nil {
		c.log.printf("User did not send valid credentials")
		return
	}
	for commands := false; ; commands = true {
		var asked request
		if connection.decoder.Decode(&asked) != nil {
			if commands {
				c.log.printf("UI closed")
			}
			return
		}
		if asked.Attach {
			c.letIn(connection, who, asked)
			return
		}
		if !commands {
			c.log.printf("NEW UI")
		}
		w := &words{log: c.log}
		if err := c.driver.Meet("mpsControlCommand"); err != nil {
			_ = connection.encoder.Encode(answer{Text: err.Error() + "\n"})
			continue
		}
		c.log.printf("Cmd:%s", asked.Command)
		done := c.command(who.Uid, asked.Command, w)
		_ = connection.encoder.Encode(answer{Text: w.shown.String(), Done: done})
		if done {
			close(c.ended)
			return
		}
	}
}
