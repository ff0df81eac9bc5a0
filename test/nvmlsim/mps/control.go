package mps

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/cuda"
)

// control is the control daemon: it lets clients in, one user after the other, and starts the server.
type control struct {
	pipes      string
	multiUser  bool
	foreground bool
	log        *logger
	driver     *cuda.Driver

	mutex    sync.Mutex
	changed  *sync.Cond // with mutex: a server came, went, or changed; the daemon ends
	defaults Limits
	server   *server
	waiting  []*attach // clients that are not let in yet, the first come first
	ending   bool
	ended    chan struct{}
}

// runDaemon is the daemon's life. ready is called when it listens.
func runDaemon(multiUser, foreground bool, ready func()) error {
	openUmask()
	c := &control{pipes: pipes(), multiUser: multiUser, foreground: foreground, ended: make(chan struct{})}
	c.changed = sync.NewCond(&c.mutex)
	if err := makeFolder(c.pipes); err != nil {
		return fmt.Errorf("make the pipe directory: %w", err)
	}
	lock, err := c.lock()
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	file, err := openLog(controlLog)
	if err != nil {
		return fmt.Errorf("open the log: %w", err)
	}
	defer func() { _ = file.Close() }()
	c.log = &logger{to: file, role: "Control"}
	if foreground {
		c.log.to = io.MultiWriter(file, os.Stderr)
	}
	if c.driver, err = cuda.Attach(); err != nil {
		return err
	}
	defer func() { _ = c.driver.Close() }()
	if err := c.driver.Meet("mpsControlStart"); err != nil {
		return err
	}
	if err := c.readDefaults(); err != nil {
		return err
	}
	return c.serve(ready)
}

// lock makes this the directory's only daemon. The lock goes with the process, whatever it leaves behind.
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

func (c *control) readDefaults() error {
	threads, memory, err := environmentLimits()
	if err != nil {
		return err
	}
	if threads == 0 {
		threads = 100
	}
	c.defaults = Limits{Threads: threads, Memory: map[int]uint64{}}
	for device, mib := range memory {
		ordinal, err := c.ordinal(device)
		if err != nil {
			return fmt.Errorf("%s: %w", memoryVariable, err)
		}
		c.defaults.Memory[ordinal] = mib
	}
	return nil
}

// ordinal gives the number, among the devices of CUDA_VISIBLE_DEVICES, of one that is named by number or UUID.
func (c *control) ordinal(device string) (int, error) {
	if number, err := strconv.Atoi(device); err == nil && number >= 0 {
		return number, nil
	}
	list, set := os.LookupEnv(devicesVariable)
	devices, err := c.driver.Select(list, set)
	if err != nil {
		return 0, err
	}
	for i, one := range devices {
		if one.UUID == device {
			return i, nil
		}
	}
	return 0, fmt.Errorf("%q is no device of this daemon", device)
}

// listen makes a socket in the pipe directory, in place of one that a killed daemon left.
func (c *control) listen(name string, mode os.FileMode) (*net.UnixListener, error) {
	path := filepath.Join(c.pipes, name)
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, errNoDaemon
	}
	listener.SetUnlinkOnClose(false) // the real daemon leaves them too
	return listener, os.Chmod(path, mode)
}

func (c *control) serve(ready func()) error {
	public, err := c.listen(controlSocket, 0o666)
	if err != nil {
		return err
	}
	privileged, err := c.listen(privilegedSocket, 0o755)
	if err != nil {
		return err
	}
	if err := syscall.Mkfifo(filepath.Join(c.pipes, logPipe), 0o777); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if err := os.WriteFile(filepath.Join(c.pipes, pidFile), []byte(strconv.Itoa(os.Getpid())+"\n"), 0o666); err != nil {
		return err
	}
	c.log.printf("Starting control daemon using socket %s", filepath.Join(c.pipes, controlSocket))
	c.log.printf("To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=%s", c.pipes)
	c.log.printf("CUDA MPS Control binary version: %d", c.driver.CUDAVersion())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go c.accept(public, c.letIn)
	go c.accept(privileged, c.obey)
	ready()
	select {
	case <-c.ended:
	case <-signals:
		c.quit(0)
	}
	c.log.printf("Exit")
	return os.Remove(filepath.Join(c.pipes, pidFile))
}

func (c *control) accept(listener *net.UnixListener, serve func(*conn)) {
	for {
		connection, err := listener.AcceptUnix()
		if err != nil {
			return
		}
		c.log.printf("Accepting connection...")
		go func() {
			defer func() { _ = connection.Close() }()
			serve(newConn(connection))
		}()
	}
}
