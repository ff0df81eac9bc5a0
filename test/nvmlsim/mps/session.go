package mps

import (
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/cuda"
)

// Session is a CUDA program's use of its GPUs. It goes through an MPS server if a control daemon
// answers, and directly to the GPUs otherwise.
type Session struct {
	// Server is the server's PID in the control daemon's PID namespace, or 0 without MPS.
	Server  int
	Devices []Device

	driver *cuda.Driver
	conn   *conn
	used   map[int]uint64
	mutex  sync.Mutex
}

// Open does what a CUDA program does at initialisation. It calls pending if the control daemon
// makes the program wait for a server.
func Open(pending func()) (*Session, error) {
	driver, err := cuda.Attach()
	if err != nil {
		return nil, err
	}
	s := &Session{driver: driver, used: map[int]uint64{}}
	if err := s.open(pending); err != nil {
		return nil, errors.Join(err, driver.Close())
	}
	return s, nil
}

func (s *Session) open(pending func()) error {
	if err := s.driver.Meet("cudaAttach"); err != nil {
		return err
	}
	if err := s.driver.Init(); err != nil {
		return err
	}
	list, set := os.LookupEnv(devicesVariable)
	threads, memory, err := environmentLimits()
	if err != nil {
		return cuda.Errorf(cuda.InvalidValue, "%v", err)
	}
	said := hello{Devices: list, Set: set, Threads: threads, Memory: memory, Command: filepath.Base(os.Args[0]), PID: os.Getpid()}
	for ended := 0; ; {
		control, err := dial(filepath.Join(pipes(), controlSocket))
		if err != nil {
			return s.alone(list, set)
		}
		var joined bool
		joined, ended, err = s.join(control, said, ended, pending)
		_ = control.Close()
		if err != nil || joined {
			return err
		}
	}
}

// alone registers the program as computing on its GPUs without MPS. It returns an error if the
// program has no GPU or a compute mode forbids it. MPS limits do not apply.
func (s *Session) alone(list string, set bool) error {
	devices, err := s.driver.Select(list, set)
	if err != nil {
		return err
	}
	if len(devices) == 0 {
		return cuda.Errorf(cuda.NoDevice, "the process was given no device")
	}
	for i, device := range devices {
		if err := s.driver.Take(device); err != nil {
			return err
		}
		s.Devices = append(
			s.Devices,
			Device{Ordinal: i, UUID: device.UUID, Name: device.Name, MemoryMiB: device.MemoryMiB, ThreadPercentage: 100},
		)
	}
	return nil
}

// join asks the control daemon for a server, but not the one whose PID is the parameter not, and
// becomes its client. If the assigned server is ending, joined is false and ended is that server's
// PID; the caller then asks again.
func (s *Session) join(control *conn, said hello, not int, pending func()) (joined bool, ended int, err error) {
	if err := control.encoder.Encode(request{Attach: true, Not: not}); err != nil {
		return false, 0, cuda.Errorf(cuda.MPSConnectionFailed, "%v", err)
	}
	var let answer
	for let.Pending = true; let.Pending; {
		let = answer{}
		if err := control.decoder.Decode(&let); err != nil {
			return false, 0, cuda.Errorf(cuda.MPSConnectionFailed, "the control daemon has ended: %v", err)
		}
		if let.Pending {
			pending()
		}
	}
	if let.Error != nil {
		return false, 0, let.Error
	}
	connection, err := dial(filepath.Join(pipes(), let.Socket))
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, os.ErrNotExist) {
		return false, let.Server, nil
	}
	if err != nil {
		return false, 0, cuda.Errorf(cuda.MPSConnectionFailed, "%v", err)
	}
	if joined, err = s.greet(connection, said); !joined {
		return false, let.Server, errors.Join(err, connection.Close())
	}
	s.Server, s.conn = let.Server, connection
	return true, 0, s.checkGiven()
}

func (s *Session) greet(connection *conn, said hello) (bool, error) {
	shared, token, err := putShared()
	if err != nil {
		return false, cuda.Errorf(cuda.MPSRPCFailure, "%v", err)
	}
	defer func() { _ = os.Remove(shared) }()
	said.Shared, said.Token = filepath.Base(shared), token
	var reply welcome
	if connection.encoder.Encode(said) != nil || connection.decoder.Decode(&reply) != nil {
		return false, errLost
	}
	if reply.Again {
		return false, nil
	}
	if reply.Error != nil {
		return false, reply.Error
	}
	s.Devices = reply.Devices
	return true, nil
}

// putShared creates a file in /dev/shm. By reading it, the server proves that it has the same
// /dev/shm.
func putShared() (path, token string, err error) {
	token = rand.Text()
	file, err := os.CreateTemp("/dev/shm", "cuda.shm.*")
	if err != nil {
		return "", "", err
	}
	_, err = file.WriteString(token)
	return file.Name(), token, errors.Join(err, file.Close())
}

// checkGiven returns an error if this process has no access to a device that the server assigned.
// An MPS client submits work itself, so it needs the device nodes too.
func (s *Session) checkGiven() error {
	for _, device := range s.Devices {
		if _, err := s.driver.Select(device.UUID, true); err != nil {
			return cuda.Errorf(cuda.InvalidDevice, "the MPS server assigned %s, to which this process has no access", device.UUID)
		}
	}
	return nil
}

// Allocate allocates mib MiB of memory on the device with this number.
func (s *Session) Allocate(ordinal int, mib uint64) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if ordinal < 0 || ordinal >= len(s.Devices) {
		return cuda.Errorf(cuda.InvalidDevice, "there is no device %d", ordinal)
	}
	if s.conn == nil {
		if device := s.Devices[ordinal]; mib > device.MemoryMiB || s.used[ordinal] > device.MemoryMiB-mib {
			return cuda.Errorf(
				cuda.OutOfMemory,
				"allocating %d MiB exceeds the %d MiB of device %d, of which %d MiB are in use",
				mib,
				device.MemoryMiB,
				ordinal,
				s.used[ordinal],
			)
		}
		s.used[ordinal] += mib
		return nil
	}
	var reply allocated
	if s.conn.encoder.Encode(allocation{Ordinal: ordinal, MiB: mib}) != nil || s.conn.decoder.Decode(&reply) != nil {
		return errLost
	}
	if reply.Error != nil {
		return reply.Error
	}
	s.used[ordinal] += mib
	return nil
}

var errLost = cuda.Errorf(cuda.MPSRPCFailure, "the MPS server has ended")

// Wait returns an error when the MPS server has ended. Without MPS it never returns. Allocate must
// not be called while Wait runs.
func (s *Session) Wait() error {
	if s.conn == nil {
		select {}
	}
	var nothing allocated
	_ = s.conn.decoder.Decode(&nothing)
	return errLost
}

// Mode returns mps if the session uses an MPS server, and direct otherwise.
func (s *Session) Mode() string {
	if s.conn == nil {
		return "direct"
	}
	return "mps"
}

// sendCommands sends the commands that next returns to the control daemon, and passes each answer
// to show. It returns when next has no more commands or the daemon has ended.
func sendCommands(next func() (string, bool), show func(string)) error {
	connection, err := dial(filepath.Join(pipes(), controlSocket))
	if err != nil {
		return errNoDaemon
	}
	defer func() { _ = connection.Close() }()
	for {
		line, more := next()
		if !more {
			return nil
		}
		var said answer
		if connection.encoder.Encode(request{Command: line}) != nil || connection.decoder.Decode(&said) != nil {
			return errNoDaemon // the daemon has ended in the meantime
		}
		show(said.Text)
		if said.Done {
			return nil
		}
	}
}
