package machine

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster/internal/cgroup"
)

// These are the file descriptors that the process that starts the machine hands to PID 1.
const (
	plugged = 3 // the starter closes it when the network cable exists
	verdict = 4 // PID 1 writes one JSON string: empty, or why the boot failed
)

// RunInit does the work of PID 1 in the machine whose folder is dir: it boots the machine and keeps
// its services running. It returns only if the machine cannot boot.
func RunInit(dir string) error {
	cable, report := os.NewFile(plugged, "plugged"), os.NewFile(verdict, "verdict")
	for _, file := range []*os.File{cable, report} {
		unix.CloseOnExec(int(file.Fd()))
	}
	err := boot(dir, cable)
	if err != nil {
		log.Printf("boot failed: %v", err)
		_ = json.NewEncoder(report).Encode(err.Error())
		return err
	}
	if err := json.NewEncoder(report).Encode(""); err != nil {
		return err
	}
	if err := report.Close(); err != nil {
		return err
	}
	select {}
}

func boot(dir string, cable *os.File) error {
	spec, err := Load(dir)
	if err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(spec.Name)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	if err := mountRoot(spec); err != nil {
		return err
	}
	if err := logTo(serviceLog("init")); err != nil {
		return err
	}
	log.Printf("machine %s boots", spec.Name)
	if _, err := io.Copy(io.Discard, bufio.NewReader(cable)); err != nil {
		return fmt.Errorf("wait for the network cable: %w", err)
	}
	if cgroup.Unified() {
		if err := cgroup.DelegateOwn("machine"); err != nil {
			return err
		}
	}
	if err := configureNetwork(spec.Network); err != nil {
		return err
	}
	children := newChildren()
	env := append([]string{"PATH=" + searchPath, "HOME=/root", "NODE_NAME=" + spec.Name}, spec.Env...)
	if err := runHook(children, spec.BootHook, env); err != nil {
		return err
	}
	return startServices(children, spec, env)
}

func logTo(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	log.SetOutput(file)
	log.SetFlags(log.LstdFlags | log.Lmicroseconds)
	// A Go panic of this process prints to standard error, so that goes to the log file too.
	return unix.Dup2(int(file.Fd()), 2)
}

func runHook(children *children, hook, env []string) error {
	if len(hook) == 0 {
		return nil
	}
	process, err := children.start(hook, env, serviceLog("boot-hook"))
	if err != nil {
		return fmt.Errorf("boot hook: %w", err)
	}
	description, success := describeExit(<-process.exit)
	log.Printf("boot hook %s: %s", hook[0], description)
	if !success {
		return fmt.Errorf("boot hook %v: %s (output: %s)", hook, description, filepath.Base(serviceLog("boot-hook")))
	}
	return nil
}

// startServices starts the services one after another and returns when the last one is ready.
func startServices(children *children, spec *Spec, env []string) error {
	services := map[string]*supervised{}
	for _, service := range spec.Services {
		services[service.Name] = &supervised{Service: service, children: children, env: env}
	}
	if err := serveControl(services); err != nil {
		return err
	}
	for _, service := range spec.Services {
		supervised := services[service.Name]
		if err := supervised.start(); err != nil {
			return err
		}
		if err := supervised.awaitReady(context.Background()); err != nil {
			return fmt.Errorf("%w (log: %s)", err, filepath.Base(supervised.logFile()))
		}
	}
	return nil
}
