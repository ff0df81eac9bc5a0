package settings

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Default is the name of the configuration that the values of a [Document] are.
const Default = "default"

// Label is the Node's label that names its configuration. DevicePluginLabel is that of NVIDIA's
// device plugin, which counts if the [Document] says so.
const (
	Label             = device.DriverName + "/config"
	DevicePluginLabel = "nvidia.com/device-plugin.config"
)

// Choose returns the name of the configuration of a Node with these labels, and why it has this
// one. It returns an error if a label names a configuration that does not exist, or if several
// configurations select the Node.
func (d Document) Choose(nodeLabels map[string]string) (name, why string, err error) {
	named := []string{Label}
	if d.DevicePluginLabel {
		named = append(named, DevicePluginLabel)
	}
	for _, label := range named {
		name := nodeLabels[label]
		if name == "" {
			continue
		}
		if _, known := d.Configurations[name]; !known && name != Default {
			return "", "", fmt.Errorf("the Node's label %s names configuration %q, which does not exist: want one of %s",
				label, name, strings.Join(append([]string{Default}, slices.Sorted(maps.Keys(d.Configurations))...), ", "))
		}
		return name, "the Node's label " + label + " names it", nil
	}
	var selecting []string
	for name, c := range d.Configurations {
		if len(c.NodeSelector) > 0 && labels.SelectorFromSet(c.NodeSelector).Matches(labels.Set(nodeLabels)) {
			selecting = append(selecting, name)
		}
	}
	slices.Sort(selecting)
	switch len(selecting) {
	case 0:
		return Default, "no label or nodeSelector chooses another", nil
	case 1:
		return selecting[0], "its nodeSelector selects the Node", nil
	}
	return "", "", fmt.Errorf("the nodeSelectors of configurations %s all select the Node: name one of them in its label %s",
		strings.Join(selecting, ", "), Label)
}
