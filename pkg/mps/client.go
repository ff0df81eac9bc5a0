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

// Resource is the URL path of the supervisor's HTTP interface on its Unix socket. The client sends
// PUT and DELETE to Resource/<daemon's ID>, and GET to Resource.
const Resource = "/v1/daemons"

// maxAnswer and maxFailure limit how many bytes of a response the client reads: maxAnswer of a
// success, maxFailure of an error. A supervisor sends far less.
const (
	maxAnswer  = 16 << 20
	maxFailure = 64 << 10
)

// State is the state of an MPS control daemon.
type State string

const (
	// Starting means that the daemon is not ready yet, at its first start or at a restart.
	Starting State = "Starting"
	// Ready means that the daemon answers at its control pipe and has all its limits.
	Ready State = "Ready"
	// Failed means that the daemon ended or could not be started. The supervisor retries.
	Failed State = "Failed"
)

// Status is what the supervisor reports about one MPS control daemon.
type Status struct {
	Daemon   Daemon `json:"daemon"`
	State    State  `json:"state"`
	PID      int    `json:"pid,omitempty"`
	Restarts int    `json:"restarts,omitempty"`
	// Since is when the daemon entered its current State.
	Since time.Time `json:"since"`
	// Error says why the daemon's last start failed or its last process ended.
	Error string `json:"error,omitempty"`
}

// Failure is the body of the supervisor's response to a failed request.
type Failure struct {
	Error string `json:"error"`
}

// NotRunningError means that no supervisor listens on Socket.
type NotRunningError struct {
	Socket string
	Err    error
}

func (e *NotRunningError) Error() string {
	return fmt.Sprintf("the MPS supervisor is not running on this node: check that the chart value mps.enabled is true "+
		"and that its DaemonSet (…-mps) has a ready Pod here (socket %s: %v)", e.Socket, e.Err)
}

func (e *NotRunningError) Unwrap() error { return e.Err }

// Client sends requests to the node's MPS supervisor. It is safe for concurrent use. The supervisor
// need not run yet when the client is created.
type Client struct {
	socket string
	http   *http.Client
}

// NewClient returns a client of the supervisor that listens on paths.Socket().
func NewClient(paths Paths) *Client {
	socket := paths.Socket()
	return &Client{socket: socket, http: &http.Client{Transport: &http.Transport{
		// Each request opens a new connection, so the first request after a supervisor's restart works.
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, socket)
		},
	}}}
}

// Start returns when the daemon runs as d describes. If the daemon already runs so, Start changes
// nothing. Start first ends a daemon with the same ID and another description.
//
// After an error, the supervisor keeps the daemon's files and may retry, until [Client.Stop].
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

// Stop returns when no process and no file of the daemon is left. An unknown ID is no error.
func (c *Client) Stop(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	if err := c.do(ctx, http.MethodDelete, Resource+"/"+id, nil, nil); err != nil {
		return fmt.Errorf("stop MPS daemon %s: %w", id, err)
	}
	return nil
}

// List returns the status of all daemons, sorted by ID.
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
			return fmt.Errorf("the MPS supervisor did not answer in time: %w", context.Cause(ctx))
		}
		if absent := new(NotRunningError); errors.As(err, &absent) {
			return absent
		}
		return fmt.Errorf("send a request to the MPS supervisor: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return responseError(response)
	}
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, maxAnswer)).Decode(into); err != nil {
		return fmt.Errorf("read the MPS supervisor's answer: %w", err)
	}
	return nil
}

// responseError returns the supervisor's error message, or the HTTP status if there is none.
func responseError(response *http.Response) error {
	data, err := io.ReadAll(io.LimitReader(response.Body, maxFailure))
	var f Failure
	if err == nil && json.Unmarshal(data, &f) == nil && f.Error != "" {
		return errors.New(f.Error)
	}
	return fmt.Errorf("the MPS supervisor answered %s: %.200s", response.Status, strings.TrimSpace(string(data)))
}

// dial connects to the supervisor's socket. It goes through a descriptor of the directory, because
// the address of a Unix socket has at most 107 characters and the kubelet's root directory may be
// deep.
func dial(ctx context.Context, socket string) (net.Conn, error) {
	var d net.Dialer
	conn, err := throughDirectory(socket, func(address string) (net.Conn, error) { return d.DialContext(ctx, "unix", address) })
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, &NotRunningError{Socket: socket, Err: err}
	}
	return conn, err
}

// Listen creates the supervisor's socket, which only root can open. It replaces an existing socket,
// so the caller must first make sure that no other supervisor runs.
func Listen(paths Paths) (net.Listener, error) {
	socket := paths.Socket()
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove the old socket of the MPS supervisor: %w", err)
	}
	// Only root can open the directory, which protects the socket between bind and chmod.
	listener, err := throughDirectory(socket, func(address string) (net.Listener, error) { return net.Listen("unix", address) })
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", socket, err)
	}
	if l, ok := listener.(*net.UnixListener); ok {
		l.SetUnlinkOnClose(false) // When the listener closes, its address may name another directory.
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("restrict the socket of the MPS supervisor to root: %w", err), listener.Close())
	}
	return listener, nil
}

// throughDirectory calls the function use with a short address of the socket, in which a file
// descriptor stands for the socket's directory. It returns the result of use.
func throughDirectory[T any](socket string, use func(address string) (T, error)) (T, error) {
	dir, err := os.Open(socket[:strings.LastIndexByte(socket, '/')+1])
	if err != nil {
		var none T
		return none, err
	}
	defer func() { _ = dir.Close() }()
	return use(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), socket[strings.LastIndexByte(socket, '/')+1:]))
}
