package driver

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"reflect"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

// settingsInterval is how often the plugin reads its settings file. The kubelet replaces the file
// up to about a minute after a change of the ConfigMap.
const settingsInterval = time.Second

// chooser keeps the node's configuration in force: that which the Node's labels choose, in the
// newest valid settings file. If the labels or the file are wrong, it reports that, and the
// configuration before stays in force.
type chooser struct {
	file   string
	events *events.Recorder
	// apply puts settings in force.
	apply func(settings.Settings)

	mu       sync.Mutex
	document settings.Document
	labels   map[string]string
	// inForce is the name of the configuration in force, and applied are its values. Before the first
	// choice inForce is empty. Then shares and effects are those of the default configuration, and no
	// GPU's partitions are changed.
	inForce string
	applied settings.Values
}

// SetLabels sets the Node's labels.
func (c *chooser) SetLabels(ctx context.Context, labels map[string]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.labels = maps.Clone(labels)
	if c.labels == nil {
		c.labels = map[string]string{}
	}
	c.choose(ctx)
}

// WatchFile follows changes of the settings file until the context ends.
func (c *chooser) WatchFile(ctx context.Context) {
	if c.file == "" {
		return
	}
	var last []byte
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		raw, err := os.ReadFile(c.file)
		if err != nil {
			c.warn(fmt.Errorf("read the settings: %w", err))
		} else if last == nil || !bytes.Equal(raw, last) {
			last = raw
			c.setFile(ctx, raw)
		}
	}, settingsInterval)
}

// setFile puts the content of a new settings file in force.
func (c *chooser) setFile(ctx context.Context, raw []byte) {
	document, err := settings.Parse(raw)
	if err != nil {
		c.warn(fmt.Errorf("%s: %w", c.file, err))
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.document = document
	c.choose(ctx)
}

// choose applies the configuration that the labels choose, if it is not in force yet. The caller
// must have the lock.
func (c *chooser) choose(ctx context.Context) {
	if c.labels == nil {
		return // before the first look at the Node
	}
	name, why, err := c.document.Choose(c.labels)
	if err != nil && c.inForce == "" {
		message := "No partitions are changed until this is correct: " + err.Error()
		c.events.EventOnChange(events.ConfigurationIgnored, message, message)
		return
	}
	if err != nil {
		c.warn(err)
		return
	}
	set, err := c.document.Compile(name)
	if err != nil { // Parse has refused that
		c.warn(err)
		return
	}
	c.events.EventOnChange(events.ConfigurationIgnored, "", "")
	values := c.document.Of(name)
	if name == c.inForce && reflect.DeepEqual(values, c.applied) {
		return
	}
	first := c.inForce == ""
	c.inForce, c.applied = name, values
	c.apply(set)
	if first && len(c.document.Configurations) == 0 {
		return // there is nothing to choose from
	}
	klog.FromContext(ctx).Info("Applied a configuration", "configuration", name, "reason", why)
	c.events.Event(events.ConfigurationInForce,
		fmt.Sprintf("Configuration %s is in force, because %s. Devices that claims hold stay as they are", name, why))
}

func (c *chooser) warn(err error) {
	message := "The configuration before stays in force: " + err.Error()
	c.events.EventOnChange(events.ConfigurationIgnored, message, message)
}
