// Package container reads what the container runtime passes to an OCI hook: the container's state
// on standard input, and the container's configuration in its bundle directory.
package container

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"
)

const (
	// maxState and maxConfig limit how many bytes of the state and of the configuration are read.
	// Runtimes write far less.
	maxState  = 1 << 20
	maxConfig = 64 << 20
)

// Container is a container that is being created.
type Container struct {
	State  specs.State
	Config specs.Spec
}

// Read parses the container's state as the runtime passes it to hooks. Then it reads config.json in
// the bundle directory that the state names.
func Read(state io.Reader) (Container, error) {
	var c Container
	if err := json.NewDecoder(io.LimitReader(state, maxState)).Decode(&c.State); err != nil {
		return c, fmt.Errorf("read the container's state from standard input: %w", err)
	}
	if err := c.readConfig(); err != nil {
		return c, fmt.Errorf("container %.100q: %w", c.State.ID, err)
	}
	return c, nil
}

func (c *Container) readConfig() error {
	if !filepath.IsAbs(c.State.Bundle) {
		return fmt.Errorf("the container's state has no bundle directory (%.100q)", c.State.Bundle)
	}
	f, err := os.Open(filepath.Join(c.State.Bundle, "config.json"))
	if err != nil {
		return fmt.Errorf("open its configuration: %w", err)
	}
	defer func() { _ = f.Close() }()
	if err := json.NewDecoder(io.LimitReader(f, maxConfig)).Decode(&c.Config); err != nil {
		return fmt.Errorf("read its configuration %s: %w", f.Name(), err)
	}
	return nil
}
