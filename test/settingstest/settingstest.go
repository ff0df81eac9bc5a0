// Package settingstest reads single settings for tests, in YAML.
package settingstest

import (
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

// Shares returns the rules of the setting "shares" with this value.
func Shares(value string) (device.ShareRules, error) {
	d, err := settings.Parse([]byte("shares: " + value))
	if err != nil {
		return device.ShareRules{}, err
	}
	s, err := d.Compile(settings.Default)
	return s.Shares, err
}
