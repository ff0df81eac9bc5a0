package machine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// Verb is what the host asks PID 1 of the machine to do with a service, such as a restart.
type Verb string

const (
	Restart Verb = "restart" // end the service with SIGTERM, start it, wait until it is ready
	Kill    Verb = "kill"    // like Restart, but with SIGKILL
	Stop    Verb = "stop"    // end the service with SIGTERM and do not start it again
	Start   Verb = "start"   // start the service and wait until it is ready
)

type request struct {
	Verb    Verb   `json:"verb"`
	Service string `json:"service"`
}

type response struct {
	Error string `json:"error,omitempty"`
}

// controlTimeout limits how long a request from the host may take, until the service has stopped or
// is ready again.
const controlTimeout = readyDeadline + 2*stopGrace

// serveControl answers the host's requests to start and stop services, each on a connection of its
// own.
func serveControl(services map[string]*supervised) error {
	if err := os.Remove(controlSocket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", controlSocket)
	if err != nil {
		return fmt.Errorf("open the control socket: %w", err)
	}
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				log.Printf("control socket: %v", err)
				return
			}
			go answer(connection, services)
		}
	}()
	return nil
}

func answer(connection net.Conn, services map[string]*supervised) {
	defer func() { _ = connection.Close() }()
	var asked request
	if err := json.NewDecoder(connection).Decode(&asked); err != nil {
		log.Printf("control socket: unreadable request: %v", err)
		return
	}
	log.Printf("asked to %s service %s", asked.Verb, asked.Service)
	var reply response
	if err := perform(asked, services); err != nil {
		reply.Error = err.Error()
		log.Print(err)
	}
	_ = json.NewEncoder(connection).Encode(reply)
}

func perform(asked request, services map[string]*supervised) error {
	service, ok := services[asked.Service]
	if !ok {
		return fmt.Errorf("this machine runs no service %q", asked.Service)
	}
	switch asked.Verb {
	case Stop:
		return service.stop(syscall.SIGTERM)
	case Restart:
		if err := service.stop(syscall.SIGTERM); err != nil {
			return err
		}
	case Kill:
		if err := service.stop(syscall.SIGKILL); err != nil {
			return err
		}
	case Start:
	default:
		return fmt.Errorf("unknown verb %q", asked.Verb)
	}
	if err := service.start(); err != nil {
		return err
	}
	return service.awaitReady(context.Background())
}

// Control asks PID 1 of the running machine to do what verb says with a service, and waits until
// that is done.
func (s *Spec) Control(ctx context.Context, verb Verb, service string) error {
	ctx, cancel := context.WithTimeout(ctx, controlTimeout)
	defer cancel()
	fail := func(err error) error {
		return fmt.Errorf("%s %s on machine %s: %w (log: %s)", verb, service, s.Name, err, filepath.Join(s.LogDir(), service+".log"))
	}
	connection, err := (&net.Dialer{}).DialContext(ctx, "unix", s.Var()+controlSocket[len("/var"):])
	if err != nil {
		return fail(fmt.Errorf("the machine does not answer: %w", err))
	}
	defer func() { _ = connection.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = connection.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := json.NewEncoder(connection).Encode(request{Verb: verb, Service: service}); err != nil {
		return fail(err)
	}
	var reply response
	if err := json.NewDecoder(connection).Decode(&reply); err != nil {
		return fail(fmt.Errorf("no answer: %w", errors.Join(err, ctx.Err())))
	}
	if reply.Error != "" {
		return fail(errors.New(reply.Error))
	}
	return nil
}
