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

// Session is a CUDA program's use of GPUs: through an MPS server where a control daemon answers, else by itself.
type Session struct {
	// Server is the server's PID as the control daemon sees it; 0 without MPS.
	Server  int
	Devices []Device

	driver *cuda.Driver
	conn   *conn
	used   map[int]uint64
	mutex  sync.Mutex
}

// Open is what CUDA does when a program first uses it. pending is called if the program must wait for clients of another user.
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

// alone takes the GPUs without MPS, as their compute mode allows. No limit holds then.
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
		s.Devices = append(s.Devices, Device{Ordinal: i, UUID: device.UUID, Name: device.Name, MemoryMiB: device.MemoryMiB, ThreadPercentage: 100})
	}
	return nil
}

// join becomes a client of a server, which is not the one that has ended. False: the server that it names has ended, too, or is about to; ask again.
func (s *Session) join(control *conn, said hello, not int, pending func()) (joined bool, ended int, err error) {
	if err := control.encoder.Encode(request{Attach: true, Not: not}); err != nil {
		return false, 0, cuda.Errorf(cuda.MPSConnectionFailed, "%v", err)
	}
	var let answer
	for let.Pending = true; let.Pending; {
		let = answer{}
		if err := control.decoder.Decode(&let); err != nil {
			return false, 0, cuda.Errorf(cuda.MPSConnectionFailed, "the control daemon went away: %v", err)
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

// putShared puts a file into /dev/shm for the server to see.
func putShared() (path, token string, err error) {
	token = rand.Text()
	file, err := os.CreateTemp("/dev/shm", "cuda.shm.*")
	if err != nil {
		return "", "", err
	}
	_, err = file.WriteString(token)
	return file.Name(), token, errors.Join(err, file.Close())
}

// checkGiven: a client submits work itself, so it needs the devices' nodes too.
func (s *Session) checkGiven() error {
	for _, device := range s.Devices {
		if _, err := s.driver.Select(device.UUID, true); err != nil {
			return cuda.Errorf(cuda.InvalidDevice, "the server computes on %s, which this process was not given", device.UUID)
		}
	}
	return nil
}

// Allocate takes MiB of a device's memory.
func (s *Session) Allocate(ordinal int, mib uint64) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if ordinal < 0 || ordinal >= len(s.Devices) {
		return cuda.Errorf(cuda.InvalidDevice, "there is no device %d", ordinal)
	}
	if s.conn == nil {
		if device := s.Devices[ordinal]; mib > device.MemoryMiB || s.used[ordinal] > device.MemoryMiB-mib {
			return cuda.Errorf(cuda.OutOfMemory, "%d MiB are beyond the %d MiB of device %d, of which %d are used", mib, device.MemoryMiB, ordinal, s.used[ordinal])
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

var errLost = cuda.Errorf(cuda.MPSRPCFailure, "the MPS server has gone")

// Wait returns when the server has gone. Without MPS it never does. Nothing may be allocated meanwhile.
func (s *Session) Wait() error {
	if s.conn == nil {
		select {}
	}
	var nothing allocated
	_ = s.conn.decoder.Decode(&nothing)
	return errLost
}

// Mode says how the session uses the GPUs.
func (s *Session) Mode() string {
	if s.conn == nil {
		return "direct"
	}
	return "mps"
}

// sendCommands sends the control daemon's commands and prints its answers, until there are no more or the daemon ends.
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
			return errNoDaemon // it has ended in the meantime
		}
		show(said.Text)
		if said.Done {
			return nil
		}
	}
}
