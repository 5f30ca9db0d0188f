"""Reading any audio file, and pure functions on samples."""

from nest_ssl.audio.read import AudioError, AudioInfo, audio_info, read_audio, read_native, verify_audio
from nest_ssl.audio.signal import ChannelSelector, Samples, resample, to_mono, trim_silence

__all__ = [
    "AudioError",
    "AudioInfo",
    "ChannelSelector",
    "Samples",
    "audio_info",
    "read_audio",
    "read_native",
    "resample",
    "to_mono",
    "trim_silence",
    "verify_audio",
]
