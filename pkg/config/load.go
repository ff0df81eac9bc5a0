package config

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

// ErrHelp is the error of [Load] for --help, after Load has printed the usage.
var ErrHelp = pflag.ErrHelp

// Load returns the configuration of a command from the defaults, the file that --config names, the
// environment and the command line arguments. lookupEnv is [os.LookupEnv] or replaces it. extra may
// add the command's own flags.
func Load(command string, args []string, lookupEnv func(string) (string, bool), extra func(*pflag.FlagSet)) (*Config, error) {
	c := Default()
	fields := c.Fields()
	flags := pflag.NewFlagSet(command, pflag.ContinueOnError)
	flags.SortFlags = false
	file := flags.String("config", "", "YAML file with any of these settings, keys in camelCase (also GPU_DRA_CONFIG)")
	for _, f := range fields {
		flags.Var(f.Value, f.Name, f.Usage+" ("+f.Env()+", "+f.Key()+")")
	}
	if extra != nil {
		extra(flags)
	}
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q: pass settings as flags, see %s --help", flags.Arg(0), command)
	}
	if *file == "" {
		*file, _ = lookupEnv("GPU_DRA_CONFIG")
	}
	if err := errors.Join(fromFile(*file, fields), fromEnvironment(lookupEnv, fields)); err != nil {
		return nil, err
	}
	if err := flags.Parse(args); err != nil { // again, because flags take precedence
		return nil, err
	}
	c.complete()
	if c.SettingsFile != "" {
		var err error
		if c.Settings, err = settings.ReadFile(c.SettingsFile); err != nil {
			return nil, fmt.Errorf("--settings: %w", err)
		}
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return c, nil
}

// fromFile sets those fields that the YAML file at path contains. It returns an error for unknown
// or repeated keys and invalid values.
func fromFile(path string, fields []Field) error {
	if path == "" {
		return nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the configuration file: %w", err)
	}
	var doc map[string]any
	if err := yaml.UnmarshalStrict(raw, &doc); err != nil {
		return fmt.Errorf("configuration file %s: %w", path, err)
	}
	byKey := map[string]Field{}
	for _, f := range fields {
		byKey[f.Key()] = f
	}
	var errs []error
	for _, k := range slices.Sorted(maps.Keys(doc)) {
		f, known := byKey[k]
		if !known {
			errs = append(errs, fmt.Errorf("configuration file %s: unknown key %q", path, k))
			continue
		}
		switch doc[k].(type) {
		case string, bool, int64, float64:
		default:
			errs = append(errs, fmt.Errorf("configuration file %s: %s: want a single value", path, k))
			continue
		}
		if err := f.Value.Set(fmt.Sprint(doc[k])); err != nil {
			errs = append(errs, fmt.Errorf("configuration file %s: %s: %w", path, k, err))
		}
	}
	return errors.Join(errs...)
}

func fromEnvironment(lookup func(string) (string, bool), fields []Field) error {
	var errs []error
	for _, f := range fields {
		v, ok := lookup(f.Env())
		if !ok {
			continue
		}
		if err := f.Value.Set(v); err != nil {
			errs = append(errs, fmt.Errorf("environment variable %s: %w", f.Env(), err))
		}
	}
	return errors.Join(errs...)
}
