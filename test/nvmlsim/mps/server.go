package mps

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/cuda"
)

// maxClients is the largest number of clients of one server, as on GPUs from Volta on.
const maxClients = 48

// service is the MPS server process. It registers as the process that computes on the GPUs, and
// enforces the limits of each client.
type service struct {
	log     *logger
	orders  *conn
	devices []cuda.Device

	mutex    sync.Mutex
	limits   Limits
	applied  int // Number of the order that set limits
	clients  []*client
	lastID   int
	draining bool
	over     chan struct{}
}

// client is a client process of the server.
type client struct {
	id, pid int
	command string
	devices []Device
	used    map[string]uint64 // MiB by device UUID
	conn    *conn
}

// runServer runs the MPS server until it ends. The control daemon has started the process with
// three open descriptors: orders, listener and log.
func runServer() error {
	file, err := net.FileConn(os.NewFile(ordersDescriptor, "orders"))
	if err != nil {
		return fmt.Errorf("%s is started by nvidia-cuda-mps-control: %w", serverProgram, err)
	}
	listener, err := net.FileListener(os.NewFile(listenDescriptor, "listener"))
	if err != nil {
		return err
	}
	s := &service{orders: newConn(file), log: &logger{to: os.NewFile(logDescriptor, serverLog), role: "Other  "}, over: make(chan struct{})}
	var given setup
	if err := s.orders.decoder.Decode(&given); err != nil {
		return err
	}
	s.limits = given.Limits
	if err := s.addEnvironment(); err != nil {
		return err
	}
	s.log.printf("Startup")
	driver, err := s.start()
	if err != nil {
		failed := new(cuda.Error)
		if !errors.As(err, &failed) {
			failed = cuda.Errorf(cuda.MPSServerNotReady, "%v", err)
		}
		s.log.printf("MPS Server failed to start: %v", failed)
		_ = s.orders.encoder.Encode(report{Error: failed})
		return err
	}
	defer func() { _ = driver.Close() }()
	s.log.printf("MPS Server is started")
	s.log.printf("activeThreadsPercentage set to %f", s.limits.Threads)
	_ = s.orders.encoder.Encode(report{Ready: true})
	go s.obey()
	go s.accept(listener)
	<-s.over
	s.log.printf("MPS Server exits")
	return nil
}

// addEnvironment sets the memory limits that the server's environment, which comes from the control
// daemon, gives by device number. A limit that a command has set stays.
func (s *service) addEnvironment() error {
	_, memory, err := environmentLimits()
	if err != nil {
		return err
	}
	if s.limits.Memory == nil {
		s.limits.Memory = map[int]uint64{}
	}
	for device, mib := range memory {
		if at, err := strconv.Atoi(device); err == nil && s.limits.Memory[at] == 0 {
			s.limits.Memory[at] = mib
		}
	}
	return nil
}

// start registers the server as a process that computes on its GPUs. If a GPU is in exclusive mode,
// no other process can then compute on it.
func (s *service) start() (*cuda.Driver, error) {
	driver, err := cuda.Attach()
	if err != nil {
		return nil, err
	}
	if err := driver.Meet("mpsServerStart"); err != nil {
		return nil, err
	}
	if err := driver.Init(); err != nil {
		return nil, err
	}
	list, set := os.LookupEnv(devicesVariable)
	if s.devices, err = driver.Select(list, set); err != nil {
		return nil, err
	}
	if len(s.devices) == 0 {
		return nil, cuda.Errorf(cuda.NoDevice, "the server was given no device")
	}
	for i, device := range s.devices {
		if err := driver.Take(device); err != nil {
			return nil, err
		}
		s.log.printf("Volta MPS: Creating server context on device %d (%s)", i, device.UUID)
	}
	return driver, nil
}

// obey carries out the control daemon's orders. If the daemon has ended, the server admits no more
// clients and ends when its last client disconnects.
func (s *service) obey() {
	for {
		var given order
		if s.orders.decoder.Decode(&given) != nil {
			given = order{Drain: true}
		}
		s.mutex.Lock()
		if given.Limits != nil {
			s.limits, s.applied = *given.Limits, given.Number
			s.report()
		}
		for _, client := range s.clients {
			if client.pid == given.Terminate {
				_ = client.conn.Close()
			}
		}
		if given.Drain {
			s.draining = true
			s.endIfIdle()
		}
		drained := s.draining
		s.mutex.Unlock()
		if drained && given.Drain {
			return
		}
	}
}

// endIfIdle ends the server if it is draining and has no client. The caller holds the mutex.
func (s *service) endIfIdle() {
	if !s.draining || len(s.clients) > 0 {
		return
	}
	select {
	case <-s.over:
	default:
		close(s.over)
	}
}

func (s *service) accept(listener net.Listener) {
	for {
		connection, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = connection.Close() }()
			s.serve(newConn(connection))
		}()
	}
}

// serve serves one client until the client disconnects, and then frees the client's memory.
func (s *service) serve(connection *conn) {
	var said hello
	if connection.decoder.Decode(&said) != nil {
		return
	}
	s.log.printf("Volta MPS Server: Received new client request")
	who, err := peer(connection)
	if err != nil {
		return
	}
	one := &client{pid: int(who.Pid), command: said.Command, used: map[string]uint64{}, conn: connection}
	reply := s.welcome(one, said)
	_ = connection.encoder.Encode(reply)
	if reply.Error != nil || reply.Again {
		return
	}
	s.log.printf("Client %d (user %d) is ACTIVE", one.pid, who.Uid)
	for {
		var asked allocation
		if connection.decoder.Decode(&asked) != nil {
			break
		}
		_ = connection.encoder.Encode(allocated{Error: s.allocate(one, asked)})
	}
	s.log.printf("Client process %d disconnected", one.pid)
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.clients = slices.DeleteFunc(s.clients, func(other *client) bool { return other == one })
	s.report()
	s.endIfIdle()
}

// welcome admits a client, or says in its answer why not.
func (s *service) welcome(one *client, said hello) welcome {
	if err := checkShared(said); err != nil {
		s.log.printf("Client %d is refused: %v", one.pid, err)
		return welcome{Error: err}
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.draining {
		return welcome{Again: true}
	}
	if len(s.clients) >= maxClients {
		return welcome{Error: cuda.Errorf(cuda.MPSMaxClientsReached, "the server has %d clients", maxClients)}
	}
	devices, err := s.devicesFor(said)
	if err != nil {
		return welcome{Error: err}
	}
	s.lastID++
	one.id, one.devices = s.lastID, devices
	s.clients = append(s.clients, one)
	s.report()
	return welcome{Devices: devices}
}

// checkShared returns an error unless client and server have the same /dev/shm. It reads the file
// that the client put there and compares the content with the client's token.
func checkShared(said hello) *cuda.Error {
	if said.Shared == "" || filepath.Base(said.Shared) != said.Shared {
		return cuda.Errorf(cuda.MPSRPCFailure, "%q is no name of a file in /dev/shm", said.Shared)
	}
	content, err := os.ReadFile(filepath.Join("/dev/shm", said.Shared))
	if err != nil || string(content) != said.Token {
		return cuda.Errorf(
			cuda.MPSRPCFailure,
			"the server does not see the client's file %s in /dev/shm: client and server have different /dev/shm (%v)",
			said.Shared,
			err,
		)
	}
	return nil
}

// devicesFor returns the server's devices that the client sees. Where both server and client have a
// limit, the smaller one applies.
func (s *service) devicesFor(said hello) ([]Device, *cuda.Error) {
	var chosen []Device
	for i, device := range s.devices {
		d := Device{
			UUID:             device.UUID,
			Name:             device.Name,
			MemoryMiB:        device.MemoryMiB,
			MemoryLimitMiB:   s.limits.Memory[i],
			ThreadPercentage: s.limits.Threads,
		}
		if said.Threads > 0 {
			d.ThreadPercentage = min(d.ThreadPercentage, said.Threads)
		}
		chosen = append(chosen, d)
	}
	if said.Set {
		chosen = filter(chosen, said.Devices)
	}
	if len(chosen) == 0 {
		return nil, cuda.Errorf(cuda.NoDevice, "CUDA_VISIBLE_DEVICES=%s names none of the server's %d devices", said.Devices, len(s.devices))
	}
	for i := range chosen {
		chosen[i].Ordinal = i
		for _, name := range []string{fmt.Sprint(i), chosen[i].UUID} {
			if own, set := said.Memory[name]; set && (chosen[i].MemoryLimitMiB == 0 || own < chosen[i].MemoryLimitMiB) {
				chosen[i].MemoryLimitMiB = own
			}
		}
	}
	return chosen, nil
}

// filter returns the devices that a client's CUDA_VISIBLE_DEVICES selects. A number in list counts
// the server's devices from 0.
func filter(devices []Device, list string) []Device {
	var chosen []Device
	for entry := range strings.SplitSeq(list, ",") {
		entry = strings.TrimSpace(entry)
		at := slices.IndexFunc(devices, func(d Device) bool { return len(entry) > len("GPU-") && strings.HasPrefix(d.UUID, entry) })
		if at < 0 {
			for i := range devices {
				if entry == fmt.Sprint(i) {
					at = i
				}
			}
		}
		if at < 0 {
			break
		}
		chosen = append(chosen, devices[at])
	}
	return chosen
}

// allocate gives a client memory of a device. It fails if the client's limit or the device's free
// memory does not suffice.
func (s *service) allocate(one *client, asked allocation) *cuda.Error {
	if asked.Ordinal < 0 || asked.Ordinal >= len(one.devices) {
		return cuda.Errorf(cuda.InvalidDevice, "there is no device %d", asked.Ordinal)
	}
	device := one.devices[asked.Ordinal]
	s.mutex.Lock()
	defer s.mutex.Unlock()
	have := one.used[device.UUID]
	if limit := device.MemoryLimitMiB; limit > 0 && (asked.MiB > limit || have > limit-asked.MiB) {
		return cuda.Errorf(
			cuda.OutOfMemory,
			"allocating %d MiB in addition to the process's %d MiB on device %d exceeds the limit of %d MiB",
			asked.MiB,
			have,
			asked.Ordinal,
			limit,
		)
	}
	all := uint64(0)
	for _, other := range s.clients {
		all += other.used[device.UUID]
	}
	if asked.MiB > device.MemoryMiB || all > device.MemoryMiB-asked.MiB {
		return cuda.Errorf(
			cuda.OutOfMemory,
			"allocating %d MiB exceeds the %d MiB of device %d, of which %d MiB are in use",
			asked.MiB,
			device.MemoryMiB,
			asked.Ordinal,
			all,
		)
	}
	one.used[device.UUID] = have + asked.MiB
	return nil
}

// report sends the control daemon the current list of clients. The caller holds the mutex.
func (s *service) report() {
	said := report{Clients: []clientReport{}, Applied: s.applied}
	for _, one := range s.clients {
		r := clientReport{PID: one.pid, ID: one.id, Command: one.command}
		for _, device := range one.devices {
			r.Devices = append(r.Devices, device.UUID)
		}
		said.Clients = append(said.Clients, r)
	}
	_ = s.orders.encoder.Encode(said)
}
