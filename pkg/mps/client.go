package mps

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"
)

// Resource is the path below which the supervisor serves its daemons: PUT and DELETE Resource/<id>, GET Resource.
const Resource = "/v1/daemons"

// How much of an answer is read, in bytes: far beyond what a supervisor has to say.
const (
	maxAnswer  = 16 << 20
	maxFailure = 64 << 10
)

// State is where a daemon is in its life.
type State string

const (
	// Starting is not ready yet, for the first time or after its process ended.
	Starting State = "Starting"
	// Ready answers at its control pipe and has all its limits.
	Ready State = "Ready"
	// Failed ended or could not be started, and is tried again after a while.
	Failed State = "Failed"
)

// Status is what the supervisor says of a daemon.
type Status struct {
	Daemon   Daemon `json:"daemon"`
	State    State  `json:"state"`
	PID      int    `json:"pid,omitempty"`
	Restarts int    `json:"restarts,omitempty"`
	// Since is when it came into this state.
	Since time.Time `json:"since"`
	// Error is why the last start failed or the last process ended.
	Error string `json:"error,omitempty"`
}

// Failure is how the supervisor answers a request that it did not fulfil.
type Failure struct {
	Error string `json:"error"`
}

// NotRunningError says that no supervisor answers at its socket.
type NotRunningError struct {
	Socket string
	Err    error
}

func (e *NotRunningError) Error() string {
	return fmt.Sprintf("the MPS supervisor is not running on this node: check that the chart value mps.enabled is true and that its DaemonSet (…-mps) has a ready Pod here (socket %s: %v)", e.Socket, e.Err)
}

func (e *NotRunningError) Unwrap() error { return e.Err }

// Client asks the node's supervisor. It may be used by several goroutines, and needs no supervisor to be made.
type Client struct {
	socket string
	http   *http.Client
}

// NewClient makes a client of the supervisor that has its socket in these paths.
func NewClient(paths Paths) *Client {
	socket := paths.Socket()
	return &Client{socket: socket, http: &http.Client{Transport: &http.Transport{
		// Each request has a connection of its own: a supervisor that was restarted is found again at once.
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, socket)
		},
	}}}
}

// Start returns when the daemon runs and is as described. One that is as described already is left alone; one that differs is ended first. After an
// error nothing of a daemon runs that was never ready; one that was is tried again and again. Where the context or the connection has ended, or the error says
// that a process is left, only [Client.Stop] makes sure.
func (c *Client) Start(ctx context.Context, d Daemon) error {
	if err := d.Validate(); err != nil {
		return err
	}
	body, err := json.Marshal(d)
	if err != nil {
		return fmt.Errorf("start MPS daemon %s: %w", d.ID, err)
	}
	if err := c.do(ctx, http.MethodPut, Resource+"/"+d.ID, body, nil); err != nil {
		return fmt.Errorf("start MPS daemon %s: %w", d.ID, err)
	}
	return nil
}

// Stop returns when nothing of the daemon is left. One that is not there is stopped already.
func (c *Client) Stop(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	if err := c.do(ctx, http.MethodDelete, Resource+"/"+id, nil, nil); err != nil {
		return fmt.Errorf("stop MPS daemon %s: %w", id, err)
	}
	return nil
}

// List says which daemons there are, by ID.
func (c *Client) List(ctx context.Context) ([]Status, error) {
	var all []Status
	if err := c.do(ctx, http.MethodGet, Resource, nil, &all); err != nil {
		return nil, fmt.Errorf("list MPS daemons: %w", err)
	}
	return all, nil
}

func (c *Client) do(ctx context.Context, method, path string, body []byte, into any) error {
	request, err := http.NewRequestWithContext(ctx, method, "http://supervisor"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := c.http.Do(request)
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("the MPS supervisor has not answered in time: %w", context.Cause(ctx))
		}
		if absent := new(NotRunningError); errors.As(err, &absent) {
			return absent
		}
		return fmt.Errorf("ask the MPS supervisor: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return failure(response)
	}
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, maxAnswer)).Decode(into); err != nil {
		return fmt.Errorf("read the MPS supervisor's answer: %w", err)
	}
	return nil
}

// failure is the reason that the supervisor gives.
func failure(response *http.Response) error {
	data, err := io.ReadAll(io.LimitReader(response.Body, maxFailure))
	var f Failure
	if err == nil && json.Unmarshal(data, &f) == nil && f.Error != "" {
		return errors.New(f.Error)
	}
	return fmt.Errorf("the MPS supervisor answers %s: %.200s", response.Status, strings.TrimSpace(string(data)))
}

// dial connects through the directory's file descriptor: the address of a Unix socket has 107 characters at most, and the kubelet's root may be deep.
func dial(ctx context.Context, socket string) (net.Conn, error) {
	var d net.Dialer
	conn, err := throughDirectory(socket, func(address string) (net.Conn, error) { return d.DialContext(ctx, "unix", address) })
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, &NotRunningError{Socket: socket, Err: err}
	}
	return conn, err
}

// Listen makes the supervisor's socket, which only root can open, in place of one that a killed supervisor left. The caller has made sure that no other
// supervisor runs.
func Listen(paths Paths) (net.Listener, error) {
	socket := paths.Socket()
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen for the plugin: %w", err)
	}
	// Between bind and chmod the directory keeps others out: it is open to root alone.
	listener, err := throughDirectory(socket, func(address string) (net.Listener, error) { return net.Listen("unix", address) })
	if err != nil {
		return nil, fmt.Errorf("listen for the plugin on %s: %w", socket, err)
	}
	if l, ok := listener.(*net.UnixListener); ok {
		l.SetUnlinkOnClose(false) // The name that it knows may be another directory's by then.
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("listen for the plugin: %w", err), listener.Close())
	}
	return listener, nil
}

// throughDirectory names the socket by its open directory, which makes the name short.
func throughDirectory[T any](socket string, use func(address string) (T, error)) (T, error) {
	dir, err := os.Open(socket[:strings.LastIndexByte(socket, '/')+1])
	if err != nil {
		var none T
		return none, err
	}
	defer func() { _ = dir.Close() }()
	return use(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), socket[strings.LastIndexByte(socket, '/')+1:]))
}
